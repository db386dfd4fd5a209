"""Training objectives: losses over all exits, and the schedules of IMTA, L2W and SDN."""
