"""How good the planner is: fitted on some published measurements, tried on others. `make validate-planner DATA=…`."""
