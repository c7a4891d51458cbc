"""How much memory a run will take, told from its settings alone: no weights, no network, no torch."""
