-- Calls waiters: notifies their processes, and ends their positions unless they make an attempt in time.
--
-- $1 owners that are called   $2 owners that are only notified   $3 this process
-- → owner, whether it is a waiter of this process, which needs no notification
WITH called AS (
  UPDATE {waiters} AS w
  SET is_called = true, alive_until = least(w.alive_until, clock_timestamp() + w.reserve_ms * interval '1 millisecond')
  WHERE w.owner = ANY($1::text[])
  RETURNING w.owner, w.process
), notified AS (
  SELECT owner, process FROM called
  UNION ALL
  SELECT w.owner, w.process FROM {waiters} AS w WHERE w.owner = ANY($2::text[])
)
SELECT owner, process = $3::text,
  CASE WHEN process <> $3::text THEN pg_notify('holdfast_' || process, owner)::text END
FROM notified
