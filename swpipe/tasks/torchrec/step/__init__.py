"""The eleven tasks, the states that they use, and the user's training step."""
