"""A MultiLangDaemon without Java. It runs KCL record processors in any language as child processes."""
