"""lamella in Megatron-FSDP's place in `megatron.training`, the programs of Megatron-LM."""
