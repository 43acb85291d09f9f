-- Notifies the processes of waiters.
--
-- Where commits wait for standbys, the waiter makes an attempt, whose own commit waits: a commit that is cancelled during this wait is not
-- on the standby, and sends its notifications.
--
-- $1 processes   $2 messages
SELECT pg_notify('holdfast_' || c.process,
  CASE WHEN current_setting('synchronous_standby_names') = '' THEN c.message ELSE split_part(c.message, ' ', 1) END
)::text
FROM unnest($1::text[], $2::text[]) AS c(process, message)
