"""Where tensors wait: host memory, disks, and the way to and from a device."""
