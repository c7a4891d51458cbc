"""What is written when a trained model leaves the project."""
