"""The calls of users' handlers: where they run, how long they may take, and what follows when they fail or hang."""
