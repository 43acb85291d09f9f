-- Runs every command that the other scripts use, on keys that do not exist. Changes nothing.
--
-- KEYS    1  the fence companion of a random name. Not its lock key: a user may have the right to some names only
--         2  its queue
--         3  the last fencing token of all names (last.lua), on a single server: a declared key needs a right, too
-- ARGV    1  a channel without subscribers
--         2  `quorum` on a node of a quorum, which has no queues
-- Answer  {}, or { the first command that the server refuses, its error }

local key, queue, channel = KEYS[1], KEYS[2], ARGV[1]
local commands = {
  { 'GET', key },
  { 'SET', key, '', 'XX', 'PX', 1 },
  { 'DEL', key },
  { 'MGET', key },
  { 'PTTL', key },
  { 'PEXPIRE', key, 1 },
  { 'TIME' },
  { 'ZADD', queue, 'XX', 0, 'none' },
  { 'ZSCORE', queue, 'none' },
  { string.find(channel, '{', 1, true) and 'SPUBLISH' or 'PUBLISH', channel, '' },
}
if ARGV[2] ~= 'quorum' then
  for _, command in ipairs({
    { 'EXISTS', key },
    { 'ZREM', queue, 'none' },
    { 'ZCOUNT', queue, 0, 0 },
    { 'ZRANGEBYSCORE', queue, 0, 0 },
    { 'ZREVRANGE', queue, 0, 0 },
  }) do
    commands[#commands + 1] = command
  end
end
for _, command in ipairs(commands) do
  local answer = redis.pcall(unpack(command))
  local refusal = type(answer) == 'table' and answer.err
  -- In this order: from Redis 7 on, up to 6.2, and for a command that was renamed. Other errors may pass.
  for _, text in ipairs(refusal and { 'NOPERM', 'The user executing the script', 'Unknown Redis command' } or {}) do
    if string.find(refusal, text, 1, true) then
      return { command[1], refusal }
    end
  end
end
return {}
