"""The processes of a trial, on one host or many: started, watched, ended, and judged."""
