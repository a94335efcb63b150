"""Coarsening: meshes with axes merged, and the neighbourhood of plans on the mesh itself."""
