"""The laboratory of leasehold: what proves it, and what one develops with; `leasehold` imports none of it."""
