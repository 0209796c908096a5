"""The audit as a transparency log: Merkle tree, signed checkpoints, proofs, verification."""
