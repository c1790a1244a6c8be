"""Pipeline programs: made by passes, verified, simulated, drawn and executed. Imports neither torch nor deepspeed."""
