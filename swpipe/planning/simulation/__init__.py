"""Simulation of plans under a cost model, and lower bounds on the interval."""
