"""Shards read by subscription (enhanced fan-out)."""
