"""The planners that others have published, under the same simulator."""
