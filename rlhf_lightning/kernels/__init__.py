"""The arithmetic of a decoder layer, forward and backward, on packed tokens: torch alone, no model.

Each block keeps for its backward pass only what cannot be had again cheaply, and multiplies in the dtype of
its input; the equations are those of the plain layers, against which the tests hold every function.
"""
