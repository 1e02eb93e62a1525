"""What the eleven tasks do, what they use, and the user's step."""
