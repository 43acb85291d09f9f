-- Locks the rows of names in their order, and creates missing ones.
--
-- $1 names   $2 whether the row of each is created
--
-- One statement: an insert of the missing rows before a lock of the others would not lock in order, and could deadlock. A conflict
-- locks the row, also where the condition of the update is false.
INSERT INTO {locks} AS l (name, fence, expires_at, since)
  SELECT c.name, 0, '-infinity', clock_timestamp()
  FROM unnest($1::bytea[], $2::boolean[]) AS c(name, is_created)
  WHERE c.is_created OR EXISTS (SELECT FROM {locks} AS s WHERE s.name = c.name)
  ORDER BY c.name
ON CONFLICT (name) DO UPDATE SET fence = l.fence WHERE false
