"""A read-only web page that shows lease tables live, with metrics and health checks."""
