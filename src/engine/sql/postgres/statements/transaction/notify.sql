-- Notifies the processes of waiters.
--
-- $1 processes   $2 messages
SELECT pg_notify('holdfast_' || c.process, c.message)::text
FROM unnest($1::text[], $2::text[]) AS c(process, message)
