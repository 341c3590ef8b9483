-- Leases in PostgreSQL: the table, a user for workers (run with --no-create), and one for tools that only look.
-- Names are examples; give both users their passwords, or another way to sign in, yourself.
CREATE TABLE leases (
  key        text PRIMARY KEY,
  stream     text NOT NULL DEFAULT '',
  shard      text NOT NULL,
  parents    text NOT NULL DEFAULT '[]',
  owner      text,
  counter    bigint NOT NULL,
  checkpoint text NOT NULL,
  sub        bigint NOT NULL DEFAULT 0,
  token      text NOT NULL DEFAULT '',
  first_hash text,
  last_hash  text,
  weight     double precision,
  heir       text,
  yields     boolean NOT NULL DEFAULT false,
  notes      text NOT NULL DEFAULT '{}',
  written    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50);
CREATE ROLE leases_worker LOGIN;
CREATE ROLE leases_reader LOGIN;
GRANT SELECT, INSERT, UPDATE, DELETE ON leases TO leases_worker;
GRANT SELECT ON leases TO leases_reader;
