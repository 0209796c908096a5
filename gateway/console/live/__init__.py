"""Live regions of pages: snapshots once a tick, and the streams that bring them to browsers."""
