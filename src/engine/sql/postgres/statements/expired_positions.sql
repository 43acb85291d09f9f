-- Returns names with positions that expired some time ago.
--
-- $1 how long an expired position is kept, in milliseconds   $2 maximum number
-- → name
SELECT DISTINCT name FROM {waiters}
WHERE alive_until < clock_timestamp() - $1::bigint * interval '1 millisecond'
LIMIT $2::bigint
