-- Releases one name as release.sql does.
--
-- $1 name   $2 owner
-- → whether its lease had not expired
WITH k AS MATERIALIZED (
  SELECT l.name, l.expires_at > clock_timestamp() AS is_live
  FROM {locks} AS l
  WHERE l.name = $1::bytea AND l.owner = $2::text AND l.queued = 0
  FOR UPDATE SKIP LOCKED
)
UPDATE {locks} AS l SET owner = NULL, expires_at = '-infinity', since = clock_timestamp(), metadata = NULL
FROM k WHERE l.name = $1::bytea
RETURNING k.is_live, set_config('synchronous_commit', 'off', true)
