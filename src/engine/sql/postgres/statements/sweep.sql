-- Removes some rows of names that have been free for an hour. Waits for no other transaction.
--
-- $1 how long a free name keeps its row, in seconds   $2 maximum number
DELETE FROM {locks} WHERE name IN (
  SELECT name FROM {locks}
  WHERE queued = 0
    AND expires_at < clock_timestamp() - $1::bigint * interval '1 second'
    AND (owner IS NOT NULL OR since < clock_timestamp() - $1::bigint * interval '1 second')
  LIMIT $2::bigint
  FOR UPDATE SKIP LOCKED)
RETURNING 1
