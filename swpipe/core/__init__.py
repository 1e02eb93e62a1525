"""What users declare: tasks, plans, effects and costs; the model of dependences; errors."""
