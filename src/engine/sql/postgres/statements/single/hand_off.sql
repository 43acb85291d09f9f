-- Releases names, and hands each name with a queue off to its first live waiter, as `Ledger::finish` does. Skips rows that another
-- transaction has locked. Leaves to a transaction: a name whose row has changed since the snapshot of the statement (its queue may have
-- changed), a first waiter that needs a reservation, and a hand-off of less than $4.
--
-- $1 names   $2 owners   $3 process   $4 the shortest hand-off, in milliseconds
-- → name, whether its lease had not expired, whether it was handed off, the owner token of the new holder if it is a waiter of $3, else
--   NULL; its fencing token, the time of the hand-off and its end in microseconds
--
-- With synchronous standbys a waiter of another process makes an attempt, as in notify.sql. Without a hand-off the commit does not wait for the disk, as in release.sql.
WITH clock AS MATERIALIZED (
  SELECT now, (date_part('epoch', now) * 1e6)::bigint AS us FROM (SELECT clock_timestamp() AS now OFFSET 0) AS c
), k AS MATERIALIZED (
  SELECT l.name, l.xmin AS version, l.expires_at > clock.now AS is_live, l.queued
  FROM clock CROSS JOIN unnest($1::bytea[], $2::text[]) AS c(name, owner)
  JOIN {locks} AS l ON l.name = c.name AND l.owner = c.owner
  FOR UPDATE OF l SKIP LOCKED
), n AS MATERIALIZED (
  SELECT k.name, w.*, least(clock.us + w.hold_ms * 1000, (date_part('epoch', w.alive_until) * 1e6)::bigint) AS until_us
  FROM clock CROSS JOIN k
  JOIN {locks} AS s ON s.name = k.name AND s.xmin = k.version
  CROSS JOIN LATERAL (SELECT q.ticket, q.owner, q.process, q.host, q.pid, q.hold_ms, q.alive_until FROM {waiters} AS q
    WHERE q.name = k.name AND q.alive_until > clock.now ORDER BY q.ticket LIMIT 1) AS w
  WHERE k.queued > 0 AND w.host IS NOT NULL AND w.hold_ms >= $4::bigint
    AND w.alive_until >= clock.now + $4::bigint * interval '1 millisecond'
), gone AS (
  DELETE FROM {waiters} AS w USING n WHERE w.ticket = n.ticket
)
UPDATE {locks} AS l SET
  owner = n.owner,
  expires_at = coalesce(least(clock.now + n.hold_ms * interval '1 millisecond', n.alive_until), '-infinity'),
  fence = CASE WHEN n.owner IS NULL THEN l.fence ELSE greatest(l.fence + 1, clock.us) END,
  since = clock.now,
  host = coalesce(n.host, l.host),
  pid = coalesce(n.pid, l.pid),
  metadata = NULL,
  queued = l.queued - (n.owner IS NOT NULL)::integer
FROM clock CROSS JOIN k LEFT JOIN n ON n.name = k.name
WHERE l.name = k.name AND (k.queued = 0 OR n.owner IS NOT NULL)
RETURNING l.name, k.is_live, n.owner IS NOT NULL, CASE WHEN n.process = $3::text THEN n.owner END, l.fence, clock.us, n.until_us,
  CASE
    WHEN n.process <> $3::text
      THEN pg_notify('holdfast_' || n.process,
        CASE WHEN current_setting('synchronous_standby_names') = '' THEN concat_ws(' ', n.owner, l.fence, clock.us, n.until_us) ELSE n.owner END
      )::text
    WHEN NOT EXISTS (SELECT FROM n) THEN set_config('synchronous_commit', 'off', true)
  END
