"""Ranks: integer factorisations, their doctor, device meshes and collectives."""
