-- Creates the missing rows of names, in their order. rows.sql locks those that no other transaction has locked.
--
-- $1 names   $2 whether the row of each is created
INSERT INTO {locks} (name, fence, expires_at, since)
  SELECT c.name, 0, '-infinity', clock_timestamp()
  FROM unnest($1::bytea[], $2::boolean[]) AS c(name, is_created)
  WHERE c.is_created AND NOT EXISTS (SELECT FROM {locks} AS s WHERE s.name = c.name)
  ORDER BY c.name
ON CONFLICT (name) DO NOTHING
