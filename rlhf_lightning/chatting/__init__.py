"""A conversation with a trained model in the terminal."""
