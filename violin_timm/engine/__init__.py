"""What recipes share: flags and configs, distributed runs, optimisers, checkpoints, logging. Import the modules."""
