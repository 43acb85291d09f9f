-- Reads rows in the order of their names, and removes those of names that have been free for an hour. Waits for no other transaction.
--
-- The row of a shared name stays while there are shares.
--
-- $1 how long a free name keeps its row, in seconds   $2 maximum number of rows   $3 the name before the first one
-- → the last name, the number of rows
WITH page AS MATERIALIZED (
  SELECT name FROM {locks} WHERE name > $3::bytea ORDER BY name LIMIT $2::bigint
), gone AS (
  DELETE FROM {locks} WHERE name IN (
    SELECT l.name FROM {locks} AS l
    WHERE l.name IN (SELECT name FROM page)
      AND l.queued = 0
      AND l.expires_at < clock_timestamp() - $1::bigint * interval '1 second'
      AND NOT (l.owner IS NULL AND position(decode('ff', 'hex') IN l.name) > 0 AND EXISTS (SELECT FROM {locks} AS s
        WHERE s.name > l.name || decode('ff', 'hex') AND s.name < l.name || decode('ff67', 'hex')))
      AND (l.owner IS NOT NULL OR l.since < clock_timestamp() - $1::bigint * interval '1 second')
    FOR UPDATE SKIP LOCKED)
)
SELECT name, (SELECT count(*) FROM page) FROM page ORDER BY name DESC LIMIT 1
