"""The builders of the embedded tiny world: ``python -m scripts.tiny.build`` makes all of it again."""
