"""The declarations of users: tasks, plans, effects and costs; the model of dependences; errors."""
