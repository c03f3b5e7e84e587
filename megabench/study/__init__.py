"""Studies: read a study file, expand it into trials, and compare the records of the trials."""
