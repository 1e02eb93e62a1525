"""What a plan does under a cost model, and what no plan can beat."""
