"""What the loader of a pipeline is made of: types of the parts, and settings of the stage."""
