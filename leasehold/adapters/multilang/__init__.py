"""A MultiLangDaemon without Java: runs KCL record processors in other languages as child processes."""
