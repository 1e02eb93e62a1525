"""Planning by modulo scheduling, with lower bounds that show how good a plan is."""
