"""An image model on generated images: a loop for a first look, with torch alone."""
