"""What `ghostnoise bench` runs: our layers beside `nn.BatchNorm`, other libraries and the bandwidth limit."""
