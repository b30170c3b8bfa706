"""Ranks: pure integer factorisations, their doctor, the device meshes and the collectives over them."""
