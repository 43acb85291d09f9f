-- Calls waiters: notifies their processes, and ends their positions unless they make an attempt in time.
--
-- $1 owners that are called   $2 owners that are only notified   $3 what is added to each of these notifications   $4 this process
-- → notification, whether it is for a waiter of this process, which needs none
WITH called AS (
  UPDATE {waiters} AS w
  SET is_called = true, alive_until = least(w.alive_until, clock_timestamp() + w.reserve_ms * interval '1 millisecond')
  WHERE w.owner = ANY($1::text[])
  RETURNING w.owner AS notification, w.process
), notified AS (
  SELECT notification, process FROM called
  UNION ALL
  SELECT w.owner || c.addition, w.process
  FROM unnest($2::text[], $3::text[]) AS c(owner, addition) JOIN {waiters} AS w USING (owner)
)
SELECT notification, process = $4::text,
  CASE WHEN process <> $4::text THEN pg_notify('holdfast_' || process, notification)::text END
FROM notified
