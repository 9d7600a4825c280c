# shellcheck shell=sh
# What NCCL needs on a site's network. Copy it, keep what is yours, and give its path:
#     FINETUNE_NCCL_HOOK=/shared/nccl.sh sbatch ... infra/slurm/finetune.sbatch ...
# The scripts read it before they start the nodes; what it exports, all ranks have.

# The interface by which nodes meet: the one of the host's address, not docker0 or a management network
export NCCL_SOCKET_IFNAME=^lo,docker
# InfiniBand: the adapters that carry traffic between GPUs, as `ibv_devices` names them
# export NCCL_IB_HCA=mlx5_0,mlx5_3,mlx5_4,mlx5_5
# RoCE: the GID index of RoCE v2 (`show_gids`) and the traffic class that the switches don't drop
# export NCCL_IB_GID_INDEX=3
# export NCCL_IB_TC=106
# What was chosen stands in the log of rank 0
# export NCCL_DEBUG=INFO
