"""The MultiLangDaemon without Java: processors of KCL in other languages, as children that speak JSON lines."""
