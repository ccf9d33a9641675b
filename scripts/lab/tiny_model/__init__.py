"""The bundled model: the little world it knows, its networks, how its pictures are read."""
