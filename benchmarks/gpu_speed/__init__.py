"""Training speed on one GPU compared with other trainers: ``python -m benchmarks.gpu_speed``.

``cases`` lists the runs and their order, ``peer`` runs transformers' Trainer and TRL's SFTTrainer, ``tune``
torchtune's own command line, ``limit`` measures a matrix product and ``equality`` the attention kernel;
``session`` goes through the cases within the time and ``page`` writes. Runs of this package and of its
engines go through :mod:`benchmarks.on_gpu.one_run`, as a user's do.
"""
