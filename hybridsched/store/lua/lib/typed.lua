-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns an error reply that names the key, or nil when it is of the type or not there.
--
-- The server's own error names no key, and comes after a script has written others.
local function wrong_type(key, kind)
  local found = redis.call('TYPE', key).ok
  if found == 'none' or found == kind then
    return nil
  end
  return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ', not a ' .. kind)
end
