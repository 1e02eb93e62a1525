"""Planners published by others, evaluated with the simulator."""
