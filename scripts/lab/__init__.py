"""Measuring, training and sweeps over model families; the image does not ship this folder.

Commands, each begun as ``python -m``, with ``--help``:

- ``scripts.lab.engine_bench``: one engine with 1 to 8 requests at once (`make engine`)
- ``scripts.lab.routing_bench``: a service with two replicas, one routing policy against the other
- ``scripts.lab.devices_bench``: one denoiser on several devices, by copies, ranks and groups
- ``scripts.lab.models_table``: writes the table of docs/models.md
- ``scripts.lab.family_sweep``: tries every pipeline that diffusers tests itself with, for
  docs/families.md
- ``scripts.lab.train_tiny``: trains the bundled model
- ``scripts.lab.check_tiny``: checks the bundled model's pictures (`make pictures`)

`families.py` has the tiny pipelines of random weights that the tests of the engine use too.
"""
