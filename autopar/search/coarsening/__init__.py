"""Coarsening: meshes with axes merged, and the neighbourhood of their plans on the mesh itself."""
